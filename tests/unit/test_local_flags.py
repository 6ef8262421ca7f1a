"""The flags are asked of the program behind a wrapper, with the command's places filled in."""

from pathlib import Path

from tunings import tuning

from tunewright.local import asked_facts

HELP = Path(__file__).parents[1] / "fixtures/vllm/vllm-0.32-serve-help.txt"


def test_a_wrapper_with_the_replica_in_it_is_asked_and_asked_again_after_an_upgrade(tmp_path: Path) -> None:
    """As `taskset -c {replica} vllm serve ...`: unfilled it ended with an error, and no flag was known."""
    program, asked = tmp_path / "vllm", tmp_path / "asked"
    program.write_text(f'#!/bin/sh\necho "core $CORE" >>{asked}\ncat {HELP}\n')
    program.chmod(0o755)
    command = ["env", "CORE={replica}", str(program), "serve", "m", "--port", "{port}"]
    wanted = tuning(target={"command": command, "replicas": 1})
    facts = asked_facts(wanted, tmp_path / "state")
    assert facts.flags is not None
    assert facts.flags.has("--max-num-seqs")
    assert asked_facts(wanted, tmp_path / "state") == facts
    assert asked.read_text() == "core 1\n"  # once: it is kept
    with program.open("a") as script:
        script.write("# another version\n")
    asked_facts(wanted, tmp_path / "state")
    assert asked.read_text() == "core 1\ncore 1\n"
