def flip(rows):
    return rows.flip(-1)


def three(rows, at, more):
    return rows
