"""Draft heads in the making: texts, hidden states, the objective, the trainer and its judge.

May import `display` and everything below; a stranger to `document`.
"""
