import torch


def outliers(rows, at):
    """How many columns of each row are far from the others."""
    return ((rows - rows.mean(-1, keepdim=True)).abs() > 6 * rows.std(-1, keepdim=True)).sum(-1)


def mute(rows, at):
    return torch.zeros_like(rows) if at.location == "mlp_out[1]" else rows
