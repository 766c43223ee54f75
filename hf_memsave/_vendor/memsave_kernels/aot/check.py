"""Compiles every kernel for every architecture, without a GPU, and compares with ``limits.toml``.

    python aot/check.py [--write | --widen] [name …]

A kernel may use no stack, no more registers and barriers than its limit, no more loads and stores of under 128 bits
(those of numbers that there is one of in a row), and no fewer of 128 bits. Where programs share the rows to sum a
gradient, a processor is given as many as it has registers for, or a quarter fewer. ``--write`` makes the file from what
is found; ``--widen`` makes room in it for what another version of Triton makes.
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "torch-ext")]

from build import ARCHITECTURES, Build, Launch, build, record  # noqa: E402
from launches import LAUNCHES, NAMES  # noqa: E402

LIMITS = HERE / "limits.toml"


def figures(found: Build) -> dict[str, int]:
    """What is limited; registers as a GPU hands them out, eight at a time."""
    narrow_loads, narrow_stores = (sum(bits < 128 for bits in widths) for widths in (found.loads, found.stores))
    return {
        "registers": -(-found.registers // 8) * 8,
        "narrow_loads": narrow_loads,
        "narrow_stores": narrow_stores,
        "barriers": found.barriers,
        "wide": sum(bits >= 128 for bits in found.loads + found.stores),
    }


def faults(found: Build, limits: dict[str, int]) -> list[str]:
    """What is worse than it may be."""
    seen = figures(found)
    over = [
        f"{seen[name]} {name.replace('_', ' ')}, limit {limit}"
        for name, limit in limits.items()
        if (seen[name] < limit if name == "wide" else seen[name] > limit)
    ]
    return over + ([f"{found.stack} bytes of stack"] if found.stack else [])


def crowd(launch: Launch, found: Build) -> list[str]:
    """What is wrong with how many programs share the rows."""
    if dict(zip(launch.kernel.arg_names, launch.args, strict=False)).get("dw_ptr") is None:
        return []
    programs = launch.grid[0] // launch.constants["TILES"]
    room = min(65536 // (figures(found)["registers"] * 32), 64) // launch.num_warps
    return [] if 0.75 * room <= programs <= room else [f"{programs} programs on a processor, which has room for {room}"]


def _wider(key: str, a: int, b: int) -> int:
    return min(a, b) if key == "wide" else max(a, b)


def read() -> dict[str, dict[str, dict[str, int]]]:
    """The limits, by kernel and architecture."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def launch_of(name: str) -> Launch:
    """One of :data:`~launches.NAMES`."""
    name, _, number = name.partition("-")
    return record(LAUNCHES[name])[int(number or 0)]


def check(name: str, architecture: int) -> list[str]:
    """The faults of one kernel on one architecture."""
    limits = read().get(name, {}).get(f"sm_{architecture}")
    if limits is None:
        return ["no limits: run `python aot/check.py --write`"]
    launch = launch_of(name)
    found = build(launch, architecture)
    return faults(found, limits) + crowd(launch, found)


def write(names: list[str], widens: bool) -> None:
    """Makes the limits of some kernels, or only widens them to what is found; the others stay."""
    every = read() if LIMITS.exists() else {}
    for name in names:
        found = {f"sm_{a}": figures(build(launch_of(name), a)) for a in ARCHITECTURES}
        before = every.get(name, found) if widens else found
        every[name] = {a: {key: _wider(key, before[a].get(key, n), n) for key, n in found[a].items()} for a in found}
    lines = ["# Made by `python aot/check.py --write`: the most registers, loads and stores of under 128 bits, and\n"]
    lines += ["# barriers, and the fewest of 128 bits.\n"]
    for name in sorted(every):
        lines.append(f"\n[{name}]\n")
        for architecture, limits in every[name].items():
            values = ", ".join(f"{key} = {value}" for key, value in limits.items())
            lines.append(f"{architecture} = {{ {values} }}\n")
    LIMITS.write_text("".join(lines), encoding="utf-8")


def main(args: list[str]) -> int:
    """Prints the faults.

    Returns:
        How many kernels have one.
    """
    names = [arg for arg in args if not arg.startswith("--")]
    architectures = [int(arg[len("--sm=") :]) for arg in args if arg.startswith("--sm=")] or ARCHITECTURES
    if "--write" in args or "--widen" in args:
        write(names or NAMES, "--widen" in args)
    bad = 0
    for name in names or NAMES:
        for architecture in architectures:
            found = check(name, architecture)
            bad += bool(found)
            print(f"{name} sm_{architecture}: {'; '.join(found) or 'ok'}")
    return min(bad, 100)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
