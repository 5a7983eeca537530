"""Stage f: whether autocast casts on the card what it is said to cast without one."""

from functools import partial

import torch

from tools.record.session import Unit

NETWORKS = ["tf_efficientnet_b0", "resnet50", "convnext_atto", "vit_tiny_patch16_224"]


def units(session):
    """One unit per network, where there is CUDA."""
    names = NETWORKS if session.full else NETWORKS[:1]
    return [Unit("f", name, partial(of_a_network, name=name), 6) for name in names if session.device.type == "cuda"]


def of_a_network(session, name):
    """How many ops of a forward pass are cast otherwise than on fake tensors."""
    import timm

    from halfbits import trace_casts

    seen = ["op", "inputs", "output", "casts"]
    network = timm.create_model(name, num_classes=1)
    images = torch.empty(2, 3, 224, 224)
    real = trace_casts(network, images, fake=False)[seen]
    fake = trace_casts(network, images, fake=True)[seen]
    same_length = len(real) == len(fake)
    differ = int((real != fake).any(axis=1).sum()) if same_length else len(real)
    session.save("04 casts", name, {"batch": 2}, {"ops": len(real), "differ": differ})
