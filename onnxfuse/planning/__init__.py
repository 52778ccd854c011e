"""From a graph to a plan: which nodes become one, and what that is worth.

passes.py      the planner's passes, in their order; context.py what each works with, plan.py what they make
matching.py    matches of fuse rules as groups of nodes; custom.py those that bring their own kernel
admission.py   what a region may hold; legality.py whether nodes may become one
regions/       regions found by what they compute, and nodes that may come into them
candidates.py  from a group of nodes to a region; known.py what is known of equal ones, identity.py what these are
costs/         how long kernels take, and what they are predicted by
weighing.py    what each candidate would gain; space.py what there is to choose from, selection.py which are taken,
               choosing.py what became of all others, objective.py what a plan is to be good at
weights/       constants beside products, folded into their weights or laid out otherwise
evidence.py    what measurements say of a plan; observed.py what a profile of a run does, recorded.py shapes seen in one
spills.py      what the compiler made of its kernels
shares.py      a plan by graph
"""
