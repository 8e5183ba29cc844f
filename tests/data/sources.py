"""What the tests of text-like sources share."""

COMMON = {"seq_length": 8, "global_batch_size": 2, "micro_batch_size": "auto", "shuffle": True}


def texts(count=60):
    """Different documents with a repeated vocabulary, some with characters of several bytes."""
    words = ["router", "expert", "token", "rank", "\u00fcber", "\u4e13\u5bb6"]
    return [" ".join(words[(i * k) % 6] for k in range(1, 12)) + f" {i}\n" for i in range(count)]


def documents(tokens, eos):
    """Token lists between the ends of documents."""
    found, current = [], []
    for token in tokens.tolist():
        if token == eos:
            found.append(current)
            current = []
        else:
            current.append(token)
    assert not current, "the last document has no end"
    return found
