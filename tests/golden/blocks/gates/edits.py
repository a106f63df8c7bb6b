def flip(rows):
    rows.neg_()
