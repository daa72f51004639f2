from pathlib import Path

from maskrcnn_trt.export.build_log import BuildLog


def test_sections_share_a_file_and_keep_their_own_errors(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "build.log")
    log.path.write_text("of an older export")
    with log.section("first.plan"):
        log.write("INFO", "begun")
        log.write("ERROR", "this\nfailed")
        log.write("INTERNAL_ERROR", "and that")
        log.write("VERBOSE", "Layers:\nName: a")
    assert log.errors == ["this failed", "and that"]
    assert log.listing == "Layers:\nName: a"
    log.write("WARNING", "after the end")
    with log.section("second.plan"):
        log.write("INFO", "begun again")
    assert (log.errors, log.listing) == ([], "")
    assert log.path.read_text() == (
        "=== first.plan\nINFO begun\nERROR this\nfailed\nINTERNAL_ERROR and that\n"
        "VERBOSE Layers:\nName: a\n=== second.plan\nINFO begun again\n"
    )


def test_a_full_disk_ends_the_log_and_not_the_build() -> None:
    log = BuildLog(Path("/dev/full"))
    with log.section("first.plan"):
        for number in range(10_000):
            log.write("ERROR", f"failed for the {number}th time")
    assert len(log.errors) == 10_000


def test_a_log_without_a_section_leaves_no_file(tmp_path: Path) -> None:
    BuildLog(tmp_path / "build.log").write("ERROR", "early")
    assert not (tmp_path / "build.log").exists()
