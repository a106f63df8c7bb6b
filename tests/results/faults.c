/* A disk that fails, or a process that dies, at a chosen call: preloaded, armed from Python through ctypes.

   Calls that change files below a folder are counted, those of libraries too.  At call number `at` the chosen thing
   happens:
     FAIL   the call fails with `code`, once
     FULL   half of a write is done, then the disk is full: every later call that needs room fails with `code`
     KILL   half of a write is done, or all of another call, then SIGKILL
     SIGNAL the call is done, then SIGINT */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, FAIL, FULL, KILL, SIGNAL };
static char folder[PATH_MAX];
static atomic_long seen;
static long at = -1;
static int how = COUNT, code, full;

void faults_arm(const char *where, int mode, long number, int error) {
  snprintf(folder, sizeof folder, "%s", where);
  seen = 0;
  how = mode;
  code = error;
  full = 0;
  at = number;
}
long faults_seen(void) { return seen; }

static int below(const char *path) { return folder[0] && strncmp(path, folder, strlen(folder)) == 0; }
static int below_fd(int fd) {
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return below(path);
}
static int below_at(int fd, const char *path) { return path[0] == '/' ? below(path) : fd == AT_FDCWD ? 0 : below_fd(fd); }

/* Whether this call is the chosen one; -1: it fails now. */
static int chosen(int mine, int needs_room) {
  if (!mine || at < 0) return 0;
  long number = seen++;
  if (full && needs_room) return errno = code, -1;
  if (number != at) return 0;
  if (how == FAIL || (how == FULL && !needs_room)) {
    if (how == FULL) { full = 1; return 0; }
    return errno = code, -1;
  }
  return 1;
}
static void after(int was) {
  if (was <= 0) return;
  int kept = errno;
  if (how == FULL) full = 1;
  if (how == KILL) kill(getpid(), SIGKILL);
  if (how == SIGNAL) kill(getpid(), SIGINT);
  errno = kept;
}
#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define DONE(call, mine, room) int was = chosen(mine, room); if (was < 0) return -1; \
  if (was && how == FULL) { full = 1; errno = code; return -1; } \
  __auto_type out = call; after(was); return out
#define CUT(count) (was && how != SIGNAL && (count) > 1 ? (count) / 2 : (count))

ssize_t write(int fd, const void *data, size_t n) {
  REAL(write); int was = chosen(below_fd(fd), 1); if (was < 0) return -1;
  ssize_t out = real(fd, data, CUT(n)); after(was); return out;
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t o) {
  REAL(pwrite); int was = chosen(below_fd(fd), 1); if (was < 0) return -1;
  ssize_t out = real(fd, data, CUT(n), o); after(was); return out;
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t o) {
  REAL(pwrite64); int was = chosen(below_fd(fd), 1); if (was < 0) return -1;
  ssize_t out = real(fd, data, CUT(n), o); after(was); return out;
}
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); DONE(real(fd, v, n), below_fd(fd), 1); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); DONE(real(fd, n), below_fd(fd), 1); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); DONE(real(fd, n), below_fd(fd), 1); }
int fsync(int fd) { REAL(fsync); DONE(real(fd), below_fd(fd), 0); }
int fdatasync(int fd) { REAL(fdatasync); DONE(real(fd), below_fd(fd), 0); }
int rename(const char *a, const char *b) { REAL(rename); DONE(real(a, b), below(b), 0); }
int renameat(int c, const char *a, int d, const char *b) { REAL(renameat); DONE(real(c, a, d, b), below_at(d, b), 0); }
int unlink(const char *a) { REAL(unlink); DONE(real(a), below(a), 0); }
int unlinkat(int d, const char *a, int f) { REAL(unlinkat); DONE(real(d, a, f), below_at(d, a), 0); }
int rmdir(const char *a) { REAL(rmdir); DONE(real(a), below(a), 0); }
int mkdir(const char *a, mode_t m) { REAL(mkdir); DONE(real(a, m), below(a), 1); }
int mkdirat(int d, const char *a, mode_t m) { REAL(mkdirat); DONE(real(d, a, m), below_at(d, a), 1); }
#define MODE va_list rest; va_start(rest, flags); mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0; va_end(rest)
int open(const char *a, int flags, ...) { MODE; REAL(open); DONE(real(a, flags, mode), below(a) && flags & O_CREAT, 1); }
int open64(const char *a, int flags, ...) { MODE; REAL(open64); DONE(real(a, flags, mode), below(a) && flags & O_CREAT, 1); }
int openat(int d, const char *a, int flags, ...) { MODE; REAL(openat); DONE(real(d, a, flags, mode), below_at(d, a) && flags & O_CREAT, 1); }
int openat64(int d, const char *a, int flags, ...) { MODE; REAL(openat64); DONE(real(d, a, flags, mode), below_at(d, a) && flags & O_CREAT, 1); }
