"""Speculation: what a step decides and does besides the plain forward.

Policy.choose    load, acceptance, cost -> Rule -> StepPlan
propose          drafter levels -> Candidates; keep_best -> the ones that get rows
build_block      roots, drafts and prefill chunks -> Block -> ForwardBatch
accept           sampled target tokens -> the matching branch -> lanes advanced
Listener.listen  the drafter's K/V of every committed row
"""
