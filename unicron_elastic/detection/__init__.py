"""Notices hangs and slowness of one job from its own pace, as pure code: samples in, verdicts out."""
