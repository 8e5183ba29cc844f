"""A class that nobody trusts."""


class Bird:
    def __call__(self, *_): ...
