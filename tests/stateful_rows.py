"""A stateful iterable, as users have them: rows of a list, in an order of their own for each
epoch.
"""

import random


class Rows:
    """``shuffles``: another order in each epoch. ``opened`` lists the epochs that were begun."""

    def __init__(self, rows, shuffles=False):
        self.rows = rows
        self.shuffles = shuffles
        self.epoch = 0
        self.opened = []
        self._at = 0
        self._next_state = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        state, self._next_state = self._next_state, None
        self._at = 0 if state is None else state["at"]
        self.opened.append(self.epoch if state is None else state["epoch"])
        order = list(range(len(self.rows)))
        if self.shuffles:
            random.Random(self.opened[-1]).shuffle(order)
        return self._read(order)

    def _read(self, order):
        while self._at < len(order):
            self._at += 1
            yield self.rows[order[self._at - 1]]

    def state_dict(self):
        return {"epoch": self.opened[-1] if self.opened else self.epoch, "at": self._at}

    def load_state_dict(self, state):
        self._next_state = state
