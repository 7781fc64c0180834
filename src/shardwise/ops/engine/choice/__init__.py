"""Which strategy of a rule is taken: what moves cost, the choice, and what is remembered of it."""
