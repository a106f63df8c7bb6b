"""From a plan to the block and the lock that a reviewer reads."""
