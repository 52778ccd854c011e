"""What the planner knows of a GPU, read from YAML profiles or from the driver.

A profile file holds one profile or a list of them; ``rules/hardware/`` has those that ship.  A GPU in the machine that
no profile describes gets one made from the driver's properties; it is never taken for another.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from onnxfuse.errors import RuleError, TargetError
from onnxfuse.resources import rules_folder
from onnxfuse.rules import yamlfile
from onnxfuse.rules.yamlfile import Document, Path_
from onnxfuse.wording import option

KIB = 1024

PROFILE = "hardware profile"
"""What messages call the file of one."""

LARGEST, LEAST = 1e9, 1e-9
"""Figures of a profile lie between these: what is computed from them stays finite."""


def _not_least(figure: float) -> float:
    if figure < LEAST:
        raise ValueError(f"input should be at least {LEAST:g}")
    return figure


PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST), AfterValidator(_not_least)]
PositiveInt = Annotated[int, Field(gt=0, le=int(LARGEST))]
Figure = Annotated[float, Field(ge=0, le=LARGEST)]
Word = Annotated[str, Field(max_length=200)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Peaks(_Model):
    """Peak arithmetic in TFLOP/s: the plain cores by type, and the matrix units (``*_matrix``) by operand type.

    0 where the GPU has no such unit.
    """

    float32: PositiveFloat
    float64: Figure = 0.0
    float16: Figure = 0.0
    float16_matrix: Figure = 0.0
    bfloat16_matrix: Figure = 0.0
    tf32_matrix: Figure = 0.0
    int8_matrix: Figure = 0.0


class MeasuredRates(_Model):
    """What a machine was seen to reach: copy bandwidth in GB/s (reads plus writes), a large product in TFLOP/s, the
    attention schedule in float16 over long rows, and tiles of products that a warp copies (Hopper), on all of the
    multiprocessors.  Without the last two, attention and products are fused where they were measured faster."""

    copy_gb_s: PositiveFloat | None = None
    product_tflops: PositiveFloat | None = None
    attention_tflops: PositiveFloat | None = None
    tile_tflops: PositiveFloat | None = None


class Limits(_Model):
    """Limits of the planner.

    Attributes:
        operators: most operators in one region.
        on_chip_kb: on-chip memory that a block may plan with, in KiB; None: what the GPU's blocks really have.
        efficiency: least share of the roofline that a region's kernel must be predicted to reach.
    """

    operators: PositiveInt = 20
    on_chip_kb: PositiveInt | None = None
    efficiency: float = Field(default=0.6, gt=LEAST, le=1)


class Profile(_Model):
    """One kind of GPU.

    Attributes:
        name: as the driver reports it, or short; aliases: what else users call it.
        architecture: "sm_90", or "" for a device that runs no CUDA.
        memory_gb: device memory in GB of 10^9 bytes, as the maker states it.
        bandwidth_gb_s: peak device-memory bandwidth, GB/s.
        l2_mb: second-level cache, MiB; l2_gain: how many times faster than device memory it serves a tensor.
        registers: 32-bit registers of a multiprocessor.
        shared_kb: shared memory of a multiprocessor, KiB; block_shared_kb: the most that one block may ask for.
        launch_us: microseconds from one launched node to the next when the GPU has nothing else to do.
        floor_us: least GPU time of a kernel, microseconds.
        view_us: microseconds of the host that a node costs which launches nothing, such as a Reshape.
        planning_only: the profile serves planning; nothing was or can be run there; note says why.
    """

    name: Word = Field(min_length=1)
    aliases: tuple[Word, ...] = ()
    architecture: str = Field(pattern=r"^(sm_\d{2,3}|)$")
    memory_gb: PositiveFloat
    bandwidth_gb_s: PositiveFloat
    peaks: Peaks
    multiprocessors: PositiveInt
    registers: PositiveInt = 65536
    shared_kb: PositiveInt
    block_shared_kb: PositiveInt
    l2_mb: PositiveFloat
    l2_gain: float = Field(default=2.5, ge=1, le=LARGEST)
    launch_us: PositiveFloat = 3.5
    floor_us: PositiveFloat = 2.0
    view_us: Figure = 1.5
    measured: MeasuredRates = MeasuredRates()
    limits: Limits = Limits()
    planning_only: bool = False
    note: str = ""

    @field_validator("note")
    @classmethod
    def _one_line(cls, text: str) -> str:
        return " ".join(text.split())

    @property
    def sm(self) -> int:
        """Compute capability as an integer (90 for "sm_90"), 0 for a device that runs no CUDA."""
        return int(self.architecture.removeprefix("sm_") or 0)

    def is_called(self, name: str) -> bool:
        """Whether a name is this GPU's, or an alias; spelling varies as in ``find_profile``."""
        return _key(name) in {_key(each) for each in (self.name, *self.aliases)}

    @property
    def bandwidth(self) -> float:
        """Bytes a second through device memory that a good kernel reaches: measured, or 0.9 of the peak."""
        return 1e9 * (self.measured.copy_gb_s or 0.9 * self.bandwidth_gb_s)

    @property
    def l2_bytes(self) -> float:
        """Bytes of the second-level cache."""
        return self.l2_mb * 1024**2

    @property
    def on_chip_bytes(self) -> int:
        """Bytes of on-chip memory that a region's block may plan with."""
        return (self.limits.on_chip_kb or self.block_shared_kb) * KIB

    def roofline(self, flops: float, nbytes: float, peak_tflops: float | None = None) -> float:
        """Least seconds that the datasheet allows for so much arithmetic and traffic, whichever is longer."""
        peak = 1e12 * (self.peaks.float32 if peak_tflops is None else peak_tflops)
        return max(nbytes / (self.bandwidth_gb_s * 1e9), flops / peak)


def shipped_profiles() -> Path:
    """The folder of the profiles that ship with the package."""
    return rules_folder() / "hardware"


def load_profiles(paths: Iterable[Path | str] = ()) -> tuple[Profile, ...]:
    """The shipped profiles and those of ``paths``: YAML files, or folders of them.

    A profile of a user's file replaces a shipped one of the same name.

    Raises:
        RuleError: a file cannot be read, is no YAML, or holds what is no profile; two profiles share a name or alias.
    """
    profiles: dict[str, tuple[Profile, Path]] = {}
    for place in (shipped_profiles(), *map(Path, paths)):
        files = sorted(place.glob("*.y*ml")) if os.path.isdir(place) else [place]
        fresh: dict[str, tuple[Profile, Path]] = {}
        for file in files:
            for profile in read_profiles(file):
                if _key(profile.name) in fresh:
                    raise RuleError(
                        f'hardware profile "{profile.name}" is defined twice',
                        place=str(file), remedy=f"it is also in {fresh[_key(profile.name)][1]}; rename one",
                    )
                fresh[_key(profile.name)] = (profile, file)
        profiles.update(fresh)
    called: dict[str, str] = {}
    for profile, file in profiles.values():
        for name in (profile.name, *profile.aliases):
            other = called.setdefault(_key(name), profile.name)
            if other != profile.name:
                raise RuleError(
                    f'"{name}" names two hardware profiles: {other} and {profile.name}',
                    place=str(file), remedy="remove the alias from one of them",
                )
    return tuple(profile for profile, _ in profiles.values())


def read_profiles(file: Path) -> tuple[Profile, ...]:
    """The profiles of one YAML file.

    Raises:
        RuleError: see ``load_profiles``.
    """
    return _profiles(file, yamlfile.read_text(file, PROFILE))


@lru_cache(maxsize=100)
def _profiles(file: Path, text: str) -> tuple[Profile, ...]:
    """The profiles of a file's text; who fuses many models reads the same each time.

    Raises:
        RuleError: see ``load_profiles``.
    """
    profiles: list[Profile] = []
    documents = yamlfile.documents(file, text, PROFILE)
    if not documents:
        raise RuleError("a hardware profile is a mapping with a name", place=str(file))
    for document in documents:
        content = document.data
        listed = isinstance(content, list)
        for number, entry in enumerate(content if listed else [content]):
            path: Path_ = (number,) if listed else ()
            if not isinstance(entry, dict):
                raise document.error(path, "a hardware profile is a mapping with a name")
            try:
                profiles.append(Profile.model_validate(entry))
            except ValidationError as error:
                # A misspelt key is also a missing one: say the first.
                found = sorted(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
                raise _rule_error(document, path, entry, found[0]) from None
    return tuple(profiles)


def _rule_error(document: Document, start: Path_, entry: Mapping[Any, Any], problem: Any) -> RuleError:
    """One of pydantic's findings, at the line where it is."""
    path = tuple(part for part in problem["loc"] if isinstance(part, (str, int)))
    place = (*start, *path)
    name = ".".join(map(str, path))
    owner = f'hardware profile "{entry["name"]}"' if isinstance(entry.get("name"), str) else "hardware profile"
    if problem["type"] == "extra_forbidden":
        models: dict[str, type[BaseModel]] = {"peaks": Peaks, "limits": Limits, "measured": MeasuredRates}
        model = models.get(str(path[0]), Profile)
        near = difflib.get_close_matches(str(path[-1])[:100], model.model_fields, 1)
        remedy = f'did you mean "{near[0]}"?' if near else f"known keys: {', '.join(model.model_fields)}"
        return document.error(place, f'{owner}: unknown key "{name}"', remedy, key=True)
    if problem["type"] == "missing":
        return document.error(place, f'{owner}: "{name}" is missing', f'add "{name}": ...')
    given = repr(problem["input"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = f'{owner}: "{name}": {message[:1].lower()}{message[1:]}, not {given[:80]}{"..." * (len(given) > 80)}'
    return document.error(place, message)


def _key(name: str) -> str:
    """Names compare without case, spaces, dashes, underscores and the maker's name."""
    key = "".join(letter for letter in name.lower() if letter.isalnum())
    for prefix in ("nvidia", "geforce", "tesla"):
        key = key.removeprefix(prefix)
    return key


def find_profile(name: str, profiles: Sequence[Profile] | None = None) -> Profile:
    """The profile of that name or alias; case, spaces and dashes do not matter.

    Raises:
        TargetError: there is none.
    """
    profiles = load_profiles() if profiles is None else profiles
    called = {_key(each): profile for profile in profiles for each in (profile.name, *profile.aliases)}
    found = called.get(_key(name))
    if found is not None:
        return found
    near = difflib.get_close_matches(_key(name), called, 1)
    known = ", ".join(profile.name for profile in profiles)
    remedy = f'did you mean "{called[near[0]].name}"?' if near else f"known: {known}"
    raise TargetError(f'no hardware profile is called "{name}"', remedy=remedy, usage=True)


def resolve_profile(target: str, rules: Iterable[Path | str] = ()) -> Profile:
    """The profile that a user asks for: a YAML file of one profile, or a name.

    Args:
        target: path of a file that ends in .yaml or .yml, or a name or alias.
        rules: folders of rules; profiles in their folders ``hardware`` are known by name.

    Raises:
        RuleError: a file cannot be read, or holds what is no profile.
        TargetError: there is no profile of that name, or not one in the file.
    """
    if Path(target).suffix.lower() not in (".yaml", ".yml"):
        return find_profile(target, known_profiles(rules))
    found = read_profiles(Path(target))
    if len(found) != 1:
        names = ", ".join(profile.name for profile in found) or "none"
        raise TargetError(
            f"a target is one hardware profile, and the file holds {len(found)} ({names})", place=target,
            remedy="keep one in the file, or put the file into the folder hardware of a rules folder, and give "
                   f"{option('rules', 'FOLDER')} and {option('target', 'NAME')}",
        )
    return found[0]


def known_profiles(rules: Iterable[Path | str] = ()) -> tuple[Profile, ...]:
    """The shipped profiles and those in the folders ``hardware`` of folders of rules.

    Raises:
        RuleError: see ``load_profiles``.
    """
    return load_profiles(folder for path in rules if os.path.isdir(folder := Path(path) / "hardware"))


def profile_for_device(properties: Mapping[str, Any], profiles: Sequence[Profile] | None = None) -> Profile:
    """The profile of a GPU in the machine, from CuPy's ``runtime.getDeviceProperties``.

    A profile fits when a name and the architecture are the GPU's own and its memory is within a tenth (one name may
    stand for several sizes of memory); else one is made from the properties.
    """
    raw = properties["name"]
    name = raw.decode() if isinstance(raw, bytes) else str(raw)
    sm = 10 * int(properties["major"]) + int(properties["minor"])
    memory = float(properties["totalGlobalMem"]) / 1e9
    fitting = (each for each in profiles_called(name, sm, profiles) if abs(memory / each.memory_gb - 1) < 0.1)
    return next(fitting, None) or _from_driver(name, sm, memory, properties)


def profiles_called(name: str, sm: int, profiles: Sequence[Profile] | None = None) -> Iterator[Profile]:
    """Profiles of that name and architecture (90 for "sm_90"), of several sizes of memory maybe; among the shipped ones
    where ``profiles`` is None."""
    return (each for each in (load_profiles() if profiles is None else profiles)
            if each.sm == sm and each.is_called(name))


def _from_driver(name: str, sm: int, memory: float, properties: Mapping[str, Any]) -> Profile:
    """A profile from what the driver states.  Clocks are in kHz, the memory bus in bits."""
    multiprocessors = int(properties["multiProcessorCount"])
    clock = float(properties.get("clockRate") or 1_500_000) * 1e3
    memory_clock, bus = float(properties.get("memoryClockRate") or 0), float(properties.get("memoryBusWidth") or 0)
    # Data rate is twice the memory clock.  A driver that no longer states clocks (CUDA 13) leaves the bus alone:
    # 10 Gbit/s a pin for a wide (stacked) bus, 14 for a narrow one, are low for what is sold today.
    rate = 2e3 * memory_clock if memory_clock else (4e9 if bus >= 2048 else 14e9)
    bandwidth = rate * (bus or 256) / 8 / 1e9
    lanes = _LANES.get(sm, 128 if sm >= 86 else 64)
    float32 = 2 * lanes * multiprocessors * clock / 1e12
    matrix = _MATRIX.get(sm, 8 if sm >= 70 else 0) * float32
    return Profile(
        name=name,
        architecture=f"sm_{sm}",
        memory_gb=memory,
        bandwidth_gb_s=bandwidth,
        peaks=Peaks(
            float32=float32, float16=float32, float16_matrix=matrix,
            bfloat16_matrix=matrix if sm >= 80 else 0.0, tf32_matrix=matrix / 2 if sm >= 80 else 0.0,
        ),
        multiprocessors=multiprocessors,
        registers=int(properties.get("regsPerMultiprocessor", 65536)),
        shared_kb=int(properties.get("sharedMemPerMultiprocessor", 65536)) // KIB,
        block_shared_kb=int(properties.get("sharedMemPerBlockOptin") or properties["sharedMemPerBlock"]) // KIB,
        l2_mb=max(float(properties.get("l2CacheSize", 0)), 1024.0**2) / 1024**2,
        limits=Limits(operators=12 if sm < 80 else 20 if sm < 90 else 32),
        note="from the driver's properties: no profile describes this GPU",
    )


_LANES = {70: 64, 72: 64, 75: 64, 80: 64, 86: 128, 87: 128, 89: 128, 90: 128}
"""float32 lanes of a multiprocessor."""

_MATRIX = {70: 8, 75: 8, 80: 16, 86: 4, 87: 4, 89: 4, 90: 15, 100: 28, 103: 28, 120: 4}
"""float16 matrix units against the float32 cores, with float32 sums."""
