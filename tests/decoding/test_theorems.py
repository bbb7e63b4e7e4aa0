"""ParallelVLM's theorems compared with their own special cases and with figures computed by hand."""

from __future__ import annotations

import pytest

from espalier.harness.decoding.speculative import theorems


def test_ideal_speedups_are_those_of_full_acceptance() -> None:
    assert theorems.sequential_ideal(9, 9) == pytest.approx(5.0)
    assert theorems.parallel_ideal(9, 9) == 9
    # Theorem 3: at gamma = c the two differ by 2 c / (c + 1).
    for c in (2, 5, 9):
        ratio = theorems.parallel_ideal(c, c) / theorems.sequential_ideal(c, c)
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
    found = [theorems.sequential_of_length(78.3 / 46.1, 5, M) for M in (4.264, 5.024)]
    found.append(theorems.sequential_of_length(78.3 / 25.8, 5, 4.822))
    assert found == pytest.approx([1.081, 1.274, 1.821], abs=5e-4)


@pytest.mark.parametrize(("acceptance", "gamma"), [(0.8, 5), (0.5, 3)])
def test_lemma_1_is_the_mean_of_a_cut_geometric_run(acceptance: float, gamma: int) -> None:
    by_terms = sum(k * (1 - acceptance) * acceptance**k for k in range(gamma))
    by_terms += gamma * acceptance**gamma
    assert theorems.accepted(acceptance, gamma) == pytest.approx(by_terms)
    assert theorems.accepted(1.0, gamma) == gamma


def test_theorem_6_is_half_a_geometric_sum() -> None:
    for acceptance in (0.3, 0.9):
        wanted = sum(acceptance**k for k in range(1, 19)) / 2
        assert theorems.parallel_rollback(9, 9, acceptance) == pytest.approx(wanted)
    # At full acceptance it is Theorem 3.
    assert theorems.parallel_rollback(9, 9, 1.0) == theorems.parallel_ideal(9, 9)


def test_the_tau_of_table_7_is_not_that_of_theorem_6() -> None:
    found = [theorems.parallel_rollback(9, 9, tau) for tau in (0.41, 0.37, 0.33, 0.27)]
    assert found == pytest.approx([0.35, 0.29, 0.25, 0.19], abs=0.01)
    needed = [theorems.parallel_rollback(9, 9, a) for a in (0.885, 0.879, 0.862, 0.841)]
    assert needed == pytest.approx([3.43, 3.28, 2.90, 2.53], abs=0.03)
