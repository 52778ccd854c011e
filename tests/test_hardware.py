"""Hardware profiles: the makers' figures, the roofline they imply, and what users see when a file is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxfuse import presence
from onnxfuse.errors import RuleError, TargetError
from onnxfuse.pipeline import profile_of
from onnxfuse.planning.costs.hardware import (
    find_profile,
    known_profiles,
    load_profiles,
    profile_for_device,
    read_profiles,
    resolve_profile,
)
from onnxfuse.runtime import Gpu

DATASHEET = {
    "A100 80 GB": (80, 2039, 19.5, 312),
    "V100 16 GB": (16, 900, 15.7, 125),
    "A6000": (48, 768, 38, 150),
    "RTX 3090 Ti": (24, 1008, 40, 160),
}


@pytest.mark.parametrize("name", DATASHEET)
def test_datasheet_figures(name: str) -> None:
    profile = find_profile(name)
    peaks = profile.peaks
    figures = (profile.memory_gb, profile.bandwidth_gb_s, peaks.float32, peaks.float16_matrix)
    assert figures == DATASHEET[name]


def test_roofline_of_an_addition_of_a_constant() -> None:
    # One float32 read and one written an element: 1008 GB/s / 8 bytes; the arithmetic would allow 40,000 billion.
    profile = find_profile("3090 Ti")
    assert 1 / profile.roofline(flops=1, nbytes=8) == pytest.approx(126e9)


@pytest.mark.parametrize(
    ("name", "bytes_an_element", "billions"), [("A100", 8, 254.875), ("V100", 8, 112.5), ("A6000", 8, 96)],
)
def test_rooflines(name: str, bytes_an_element: int, billions: float) -> None:
    assert 1e-9 / find_profile(name).roofline(1, bytes_an_element) == pytest.approx(billions)


def test_roofline_of_arithmetic() -> None:
    assert find_profile("V100").roofline(15.7e12, 8) == pytest.approx(1.0)
    assert find_profile("V100").roofline(125e12, 8, peak_tflops=125) == pytest.approx(1.0)


def test_planner_limits() -> None:
    limits = {name: find_profile(name).limits for name in ("Ascend 910", "A100", "H100")}
    assert (limits["Ascend 910"].operators, limits["Ascend 910"].efficiency) == (10, 0.7)
    assert (limits["A100"].operators, limits["A100"].efficiency) == (20, 0.6)
    assert (limits["H100"].operators, limits["H100"].efficiency) == (32, 0.65)
    assert find_profile("Ascend 910").on_chip_bytes == 192 * 1024
    # NVIDIA GPUs have what a block may really ask for.
    assert find_profile("A100").on_chip_bytes == 163 * 1024
    assert find_profile("H100").on_chip_bytes == 227 * 1024
    assert find_profile("T4").on_chip_bytes == 64 * 1024


def test_measured_figures_of_the_h200() -> None:
    profile = find_profile("H200")
    assert profile.measured.copy_gb_s == 4300
    assert profile.measured.product_tflops == 790
    assert (profile.multiprocessors, profile.l2_mb, profile.launch_us) == (132, 60, 3.5)
    assert profile.bandwidth == 4.3e12
    assert find_profile("A100").bandwidth == pytest.approx(0.9 * 2039e9)


def test_every_profile_that_ships() -> None:
    names = {profile.name: profile for profile in load_profiles()}
    assert set(names) == {
        "T4", "V100", "A10", "A100 80 GB", "A6000", "RTX 3090 Ti", "L4", "L40S", "H100", "H200", "B200", "Ascend 910",
    }
    planning_only = {name for name, profile in names.items() if profile.planning_only}
    assert planning_only == {"V100", "Ascend 910"}
    assert all(profile.note for profile in names.values() if profile.planning_only)
    assert {profile.sm for profile in names.values() if not profile.planning_only} == {75, 80, 86, 89, 90, 100}


@pytest.mark.parametrize("name", ["a100", "A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB", "A100  80 gb", "a100_80gb"])
def test_names_and_aliases(name: str) -> None:
    assert find_profile(name).name == "A100 80 GB"


def test_unknown_name() -> None:
    with pytest.raises(TargetError) as caught:
        find_profile("H2000")
    assert str(caught.value) == 'no hardware profile is called "H2000"\nhelp: did you mean "H200"?'
    with pytest.raises(TargetError) as caught:
        find_profile("abacus", [find_profile("T4"), find_profile("L4")])
    assert str(caught.value) == 'no hardware profile is called "abacus"\nhelp: known: T4, L4'


def properties(name: bytes, sm: int, memory: int, **more: Any) -> dict[str, Any]:
    return {
        "name": name, "major": sm // 10, "minor": sm % 10, "totalGlobalMem": memory, "multiProcessorCount": 100,
        "regsPerMultiprocessor": 65536, "sharedMemPerMultiprocessor": 102400, "sharedMemPerBlock": 49152,
        "sharedMemPerBlockOptin": 101376, "l2CacheSize": 48 * 1024**2, **more,
    }


@pytest.mark.parametrize(
    ("name", "sm", "memory", "expected"),
    [
        (b"NVIDIA H200", 90, 150754820096, "H200"),
        (b"NVIDIA H100 80GB HBM3", 90, 85520809984, "H100"),
        (b"NVIDIA A100-SXM4-80GB", 80, 85899345920, "A100 80 GB"),
        (b"NVIDIA RTX A6000", 86, 51041271808, "A6000"),
        (b"NVIDIA GeForce RTX 3090 Ti", 86, 25757220864, "RTX 3090 Ti"),
        (b"Tesla T4", 75, 15835660288, "T4"),
        (b"NVIDIA L40S", 89, 47810936832, "L40S"),
    ],
)
def test_a_gpu_in_the_machine_finds_its_profile(name: bytes, sm: int, memory: int, expected: str) -> None:
    assert profile_for_device(properties(name, sm, memory)).name == expected


@pytest.mark.parametrize(
    ("name", "sm", "memory"),
    [
        (b"NVIDIA A100-SXM4-40GB", 80, 42949672960),  # a name of its own
        (b"NVIDIA H200", 89, 150754820096),  # another architecture under the name
        (b"NVIDIA L4", 89, 12 * 10**9),  # half of the memory under the name
    ],
)
def test_a_gpu_without_a_profile_is_never_taken_for_another(name: bytes, sm: int, memory: int) -> None:
    profile = profile_for_device(
        properties(name, sm, memory, clockRate=1_410_000, memoryClockRate=1_215_000, memoryBusWidth=5120)
    )
    assert profile.name == name.decode()
    assert profile.note == "from the driver's properties: no profile describes this GPU"
    assert (profile.sm, profile.multiprocessors, profile.block_shared_kb, profile.l2_mb) == (sm, 100, 99, 48)
    assert profile.memory_gb == pytest.approx(memory / 1e9)
    # 2 x 1.215 GHz x 5120 bits / 8; 2 operations x lanes x multiprocessors x 1.41 GHz
    assert profile.bandwidth_gb_s == pytest.approx(1555.2)
    assert profile.peaks.float32 == pytest.approx(2 * (64 if sm == 80 else 128) * 100 * 1.41e9 / 1e12)


def test_a_driver_that_states_no_clocks() -> None:
    profile = profile_for_device(properties(b"NVIDIA X", 120, 32 * 10**9, memoryBusWidth=512))
    assert profile.bandwidth_gb_s == pytest.approx(14 * 512 / 8)
    assert profile.peaks.float32 > 0


PROFILE = """\
name: Mine
architecture: sm_90
memory_gb: 80
bandwidth_gb_s: 3000
peaks: {float32: 60}
multiprocessors: 132
shared_kb: 228
block_shared_kb: 227
l2_mb: 50
"""


def test_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(PROFILE, encoding="utf-8")
    profiles = load_profiles([tmp_path])
    assert find_profile("mine", profiles).bandwidth_gb_s == 3000
    assert find_profile("T4", profiles).sm == 75
    (tmp_path / "mine.yaml").write_text(PROFILE.replace("Mine", "h200"), encoding="utf-8")
    assert find_profile("H200", load_profiles([tmp_path / "mine.yaml"])).bandwidth_gb_s == 3000


def test_a_target_may_be_a_file_or_a_profile_beside_rules(tmp_path: Path) -> None:
    file = tmp_path / "hardware" / "mine.yaml"
    file.parent.mkdir()
    file.write_text(PROFILE, encoding="utf-8")
    assert resolve_profile(str(file)).bandwidth_gb_s == 3000
    assert resolve_profile("Mine", [tmp_path]).bandwidth_gb_s == 3000
    assert profile_of("mine", [tmp_path]).name == "Mine"
    assert {profile.name for profile in known_profiles([tmp_path])} > {"Mine", "H200"}
    assert known_profiles([file]) == known_profiles()
    with pytest.raises(TargetError, match='no hardware profile is called "mine"'):
        resolve_profile("mine")


@pytest.mark.parametrize(("text", "held"), [("[]\n", "0 (none)"), ("- {x}\n- {y}\n", "2 (Mine, Other)")])
def test_a_target_file_holds_one_profile(text: str, held: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    one, other = ("\n  ".join(PROFILE.replace("Mine", name).splitlines()) for name in ("Mine", "Other"))
    file.write_text(text.replace("{x}", one).replace("{y}", other), encoding="utf-8")
    with pytest.raises(TargetError) as caught:
        resolve_profile(str(file))
    assert str(caught.value) == (
        f"a target is one hardware profile, and the file holds {held}\n--> {file}\nhelp: keep one in the file, or put "
        "the file into the folder hardware of a rules folder, and give rules=[\"FOLDER\"] and target=\"NAME\""
    )


WRONG = {
    "typo in a key": (
        PROFILE.replace("bandwidth_gb_s", "bandwith_gb_s"),
        'hardware profile "Mine": unknown key "bandwith_gb_s"\n--> FILE:4:1\n  |\n4 | bandwith_gb_s: 3000\n'
        '  | ^^^^^^^^^^^^^\nhelp: did you mean "bandwidth_gb_s"?',
    ),
    "nested typo": (
        PROFILE.replace("float32: 60", "float32: 60, flaot16: 3"),
        'hardware profile "Mine": unknown key "peaks.flaot16"\n--> FILE:5:22\n  |\n5 | '
        'peaks: {float32: 60, flaot16: 3}\n  |                      ^^^^^^^\nhelp: did you mean "float16"?',
    ),
    "missing key": (
        PROFILE.replace("l2_mb: 50\n", ""),
        'hardware profile "Mine": "l2_mb" is missing\n--> FILE:1:1\n  |\n1 | name: Mine\n  | ^\nhelp: add "l2_mb": ...',
    ),
    "not a number": (
        PROFILE.replace("132", "many"),
        'hardware profile "Mine": "multiprocessors": input should be a valid integer, unable to parse string as an '
        "integer, not 'many'\n--> FILE:6:18\n  |\n6 | multiprocessors: many\n  |                  ^^^^",
    ),
    "below zero": (
        PROFILE.replace("3000", "-1"),
        'hardware profile "Mine": "bandwidth_gb_s": input should be greater than 0, not -1\n--> FILE:4:17\n  |\n'
        "4 | bandwidth_gb_s: -1\n  |                 ^^",
    ),
    "no mapping": ("- T4\n", 'a hardware profile is a mapping with a name\n--> FILE:1:3\n  |\n1 | - T4\n  |   ^^'),
    "no YAML": (
        "name: [T4\n",
        "This is not YAML: did not find expected ',' or ']'.\n--> FILE:2:1\n  |\n2 | \n  | ^\n"
        "help: Check indentation, colons and quotes around this place.",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_messages_for_wrong_files(case: str, tmp_path: Path) -> None:
    text, message = WRONG[case]
    file = tmp_path / "wrong.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RuleError) as caught:
        read_profiles(file)
    assert str(caught.value).replace(str(file), "FILE") == message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(RuleError) as caught:
        load_profiles([tmp_path / "none.yaml"])
    assert str(caught.value) == (
        f"The hardware profile cannot be read: No such file or directory.\n--> {tmp_path / 'none.yaml'}\n"
        "help: Give the path of a text file."
    )


def test_two_profiles_of_one_name(tmp_path: Path) -> None:
    for name in ("a.yaml", "b.yaml"):
        (tmp_path / name).write_text(PROFILE, encoding="utf-8")
    with pytest.raises(RuleError) as caught:
        load_profiles([tmp_path])
    assert str(caught.value) == (
        f'hardware profile "Mine" is defined twice\n--> {tmp_path / "b.yaml"}\n'
        f'help: it is also in {tmp_path / "a.yaml"}; rename one'
    )


def test_an_alias_that_another_profile_has(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(PROFILE + "aliases: [A100]\n", encoding="utf-8")
    with pytest.raises(RuleError) as caught:
        load_profiles([tmp_path])
    assert caught.value.message == '"A100" names two hardware profiles: A100 80 GB and Mine'


@pytest.mark.parametrize(("name", "capability", "known"), [
    ("NVIDIA H200", (9, 0), "H200"), ("NVIDIA H200", (12, 0), None), ("NVIDIA Z9000", (9, 0), None)])
def test_a_gpu_whose_driver_is_older_than_cupy_is_known_by_its_name(
    name: str, capability: tuple[int, int], known: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(device: int) -> None:
        raise RuntimeError("cudaErrorInsufficientDriver")  # as CuPy's error for it is

    monkeypatch.setattr(presence, "present_gpus", lambda: (Gpu(0, name, capability, 132, (12, 0)),))
    monkeypatch.setattr("cupy.cuda.runtime.getDeviceProperties", refuses)
    found = presence.present_profile()
    assert (None if found is None else found.name) == known
    assert presence.present_profile(1) is None
