"""ParallelVLM's theorems compared with their own special cases and with figures computed by hand."""

from __future__ import annotations

import pytest

from lab.analytic import parallelvlm_formulas as theorems


def test_ideal_speedups_are_those_of_full_acceptance() -> None:
    assert theorems.sequential(9, 9, 1.0) == pytest.approx(5.0)
    assert theorems.parallel(9, 9, 1.0) == 9
    # Theorem 3: at gamma = c the two differ by 2 c / (c + 1).
    for c in (2, 5, 9):
        ratio = theorems.parallel(c, c, 1.0) / theorems.sequential(c, c, 1.0)
        assert ratio == pytest.approx(2 * c / (c + 1))


def test_speedups_follow_from_times_of_a_token() -> None:
    c, gamma, share = 5.0, 3, 0.7
    seconds = (gamma + c) / (share * gamma + 1)  # T_SD in units of t, Theorem 4
    assert theorems.sequential(c, gamma, share) == pytest.approx(c / seconds)
    seconds = max(gamma, c) / (share * gamma)  # T_PSD, Theorem 5
    assert theorems.parallel(c, gamma, share) == pytest.approx(c / seconds)
    assert theorems.parallel(9, 9, 0.41) == pytest.approx(0.41 * 9)


def test_table_1_by_theorem_4() -> None:
    # 0.5B and 7B: T_p 78.3 ms, T_q 46.1 ms (25.8 ms with a tenth of the video), five tokens a round.
    ratios = [theorems.sequential_of_length(78.3 / 46.1, 5, M) for M in (4.264, 5.024)]
    ratios.append(theorems.sequential_of_length(78.3 / 25.8, 5, 4.822))
    assert ratios == pytest.approx([1.081, 1.274, 1.821], abs=5e-4)
