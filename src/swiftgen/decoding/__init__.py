"""The algorithm: draft, verify, accept, commit; what drafts, what plans, what samples.

May import `heads`, `forward`, `settings` and `system`; knows neither command line nor files of a run.
"""
