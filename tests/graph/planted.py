"""A router with a host read in it, as a user might write one."""

from typing import Any

from sidestream.routing.router import Decision, SoftmaxRouter


class CuriousRouter(SoftmaxRouter):
    """Looks at the largest logit."""

    def __call__(self, logits: Any, **kwargs: Any) -> Decision:
        self.largest = logits.max().item()
        return super().__call__(logits, **kwargs)


LINE = CuriousRouter.__call__.__code__.co_firstlineno + 1
