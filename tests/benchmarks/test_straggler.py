"""A rank that is four times slower: the table has the right shares."""

import straggler


def test_shares_of_the_own_pace():
    alone = [{"steps_per_second": 10.0}] * 3 + [{"steps_per_second": 2.5}]
    exchanging = [
        {"steps_per_second": pace, "rounds": 4, "counted": counted}
        for pace, counted in ((9.5, 90), (9.0, 80), (10.0, 100), (2.4, 30))
    ]
    results = {"alone": alone, "synchronous": exchanging, "asynchronous": exchanging[::-1]}
    found = straggler.summary({"results": results, "seconds": 10.0, "machine": {"cores": 2}})
    assert "| synchronous | 90 % | 96 % | 4 | 30 |" in found
    assert "| asynchronous | 24 % | 380 % | 4 | 30 |" in found
