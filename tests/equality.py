"""The one way in which outputs are compared.

Programs of different shapes (batch sizes, tensor-parallel sizes) differ in the last bits, so two right runs may part
where the two best candidates are all but equal, and nowhere else.
"""

MARGIN = 1e-3  # a difference of scores that rounding may turn


def assert_same_tokens(reference, got, what=""):
    """Token ids equal, or at the first difference the reference's gap between its two best candidates is below MARGIN.

    reference, got: output lines with token_ids, and top_logits ([[id, score], ...] for each token; the scores hold the
    Gumbel noise where a request samples).
    """
    assert "error" not in got, f"{what}: {got}"
    a, b = reference["token_ids"], got["token_ids"]
    if a == b:
        return
    at = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    gaps = [gap(line, at) for line in (reference, got)]
    assert gaps[0] < MARGIN, (f"{what}: token {at} is {b[at:at + 1]}, expected {a[at:at + 1]}; gap of the reference {gaps[0]:.4g}, "
                              f"of the other {gaps[1]:.4g}\n expected {a}\n got      {b}")


def gap(line, at):
    """Best minus second best score of a line's token; 0 past its end."""
    tops = line["top_logits"]
    return tops[at][0][1] - tops[at][1][1] if at < len(tops) else 0.0


def assert_close_logits(reference, got, relative, what=""):
    """The reference's best candidates have the same scores, relative to the largest, as long as the tokens are equal."""
    for i, (theirs, ours) in enumerate(zip(reference["top_logits"], got["top_logits"])):
        scale = max(abs(score) for _, score in theirs)
        found = dict(map(tuple, ours))
        for token, score in theirs[:2]:
            assert token in found, f"{what}: token {i}: candidate {token} is not among {ours}"
            assert abs(found[token] - score) <= relative * scale, f"{what}: token {i}: candidate {token} has {found[token]}, expected {score}"
        if reference["token_ids"][i] != got["token_ids"][i]:
            return
