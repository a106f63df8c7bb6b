def add(verbs):
    pass
