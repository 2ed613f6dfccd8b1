from autopar.solver.cost.cost import Cost, total


def test_costs_add_and_scale() -> None:
    a, b = Cost(1.0, 2.0, 3.0), Cost(communication_seconds=0.5)
    assert a + b == Cost(1.0, 2.5, 3.0)
    assert (a + b).seconds == 3.5
    assert a * 2 == 2 * a == Cost(2.0, 4.0, 6.0)
    assert total([a, b, a]) == Cost(2.0, 4.5, 6.0)
    assert total([]) == Cost() == a * 0


def test_text_has_units() -> None:
    assert str(Cost(1.0, 2.0, 3.0)) == "3 s (compute 1 s, communication 2 s, 3 bytes)"
