"""What `%gpupool env` says."""

from __future__ import annotations

from gpupool.notebook.pool.tables import env_text


def test_few_variables_are_on_one_line_and_many_on_one_each() -> None:
    assert env_text({"A": "ab12cd", "B": "ef34"}, 2) == "On 2 ranks: A (ab12cd), B (ef34)"
    many = env_text({f"AWS_{n}": "ab12cd" for n in range(6)}, 8, credentials="good until 14:03")
    first, *rest, last = many.splitlines()
    assert first == "On 8 ranks:"
    assert rest == [f"  AWS_{n} (ab12cd)" for n in range(6)]
    assert last == "good until 14:03"
