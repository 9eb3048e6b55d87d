"""The flags of `moemb convert` that choose a design, and what a card says of it."""

import argparse

from .convert_safetensors import ConversionError
from .upcycling import DESIGNS, Design


_UPCYCLING = {
    "granularity": (int, "shards that a dense network is cut into, G"),
    "replicas": (int, "copies of each shard, R: there are G R experts"),
    "top_k": (int, "experts per token, a multiple of G; by default G, which computes as much as the dense model"),
    "router_std": (float, "standard deviation of the router's random rows"),
    "noise": (float, "noise on the experts' weights, relative to the standard deviation of their matrix"),
    "reinit": (float, "share of each expert's channels that is drawn anew, such as 0.5"),
    "design_seed": (int, "seed of these draws"),
}
_FIELDS = {"design_seed": "seed"}


def add_design_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--design` and the flags of upcycling."""
    parser.add_argument(
        "--design",
        choices=DESIGNS,
        default="native",
        help="native: the experts of a mixture-of-experts checkpoint (default); from a dense checkpoint upcycled: its "
        "networks cut and copied into experts under a new router, modality: a copy for each modality, dense: as it is",
    )
    group = parser.add_argument_group("upcycling (--design upcycled)")
    for name, (kind, text) in _UPCYCLING.items():
        default = getattr(Design(), _FIELDS.get(name, name))
        shown = "" if default is None else f" (default {default})"
        group.add_argument("--" + name.replace("_", "-"), type=kind, help=text + shown)


def design_of(args: argparse.Namespace) -> Design:
    """The design that the flags describe.

    Raises:
        ConversionError: a flag of upcycling with another design, or a value out of range.
    """
    given = {name: getattr(args, name) for name in _UPCYCLING if getattr(args, name) is not None}
    if given and args.design != "upcycled":
        flags = ", ".join("--" + name.replace("_", "-") for name in given)
        raise ConversionError(f"{flags} needs --design upcycled, but the design is {args.design}")
    return Design(args.design, **{_FIELDS.get(name, name): value for name, value in given.items()})


def description_of(design: Design, source: str) -> str:
    """What a card says of the conversion, one paragraph."""
    made = f"Converted from {source} by `moemb convert`"
    if design.kind == "native":
        return f"{made}."
    if design.kind == "dense":
        return f"{made} as a dense model, without experts."
    if design.kind == "modality":
        return (
            f"{made}: the dense network of each block has a copy for text, image and video tokens, chosen by the kind "
            "of the token. The three are equal until they are trained."
        )
    changed = [f"noise of {design.noise:g} standard deviations"] if design.noise else []
    changed += [f"{design.reinit:.0%} of each expert's channels drawn anew"] if design.reinit else []
    after = f"changed by {' and '.join(changed)}" if changed else "equal to the dense model until it is trained"
    return (
        f"{made}: upcycled, each dense network cut into {design.granularity} experts, {design.replicas} "
        f"copies of each, {design.experts_per_token} of {design.experts} per token, no shared expert, under a router "
        f"that has learned nothing; {after}."
    )
