"""One trial: a user's script in its own process, isolated from the user's files, and the parent that controls it.

`setup` is what all trials of a script have in common, `process` the parent's end of one, `child` the process.
`fork_server` starts one that has loaded torch already, `StartedScript` one that is at the script's first step already.
Settings are passed in a file, then each message is one JSON line
(`messages`). The parent may receive, whatever it asked for:

    isolated                   how the script is isolated from the user's files: always the first
    refused  reason            no line of the script has run: there is no isolation, or no such module
    alone  reason              no line has run: the script needs a process that was not forked
    stopped  reason            the script was about to write, and nothing else protects the user's files here
    fault  reason              an error of ours
    ended  status, error, note, steps, script_steps      the script has ended; preceded by what was found until then

A command that applies from the script's first line is one of the settings, and has one answer, of the same name:

    memory  steps                          -> what holds the memory of these steps, and what leaks
    profile  steps, warm_up, timed, timed_seconds, follow, settle, trace -> where the time of these steps went
    determinism  steps, deterministic      -> digests of the weights after these steps, and the time of one

Without one, the script runs until its first recognized step, and then waits for commands (`session`):

    ready  step_kind, ranks                it is there; ranks: of torch.distributed's group, 1 without one
    describe                               -> what was observed of the loop (`Observed`)
    window  levers, settle, steps, suspended -> seconds of each measured step, with exactly these levers on
    breakdown  levers, steps               -> where the time of each step went
    work                                   -> what one step computes (`StepWork`)
    operators  levers                      -> every operator of one step (`StepOperators`)
    peak  levers, steps                    -> peak memory of a step's tensors
    numerics  levers, request              -> losses, gradients and final weights of the next steps (`NumericsRequest`)
    forkable                               -> why other trials cannot be forked from it at its first step (`forking`)
    fork  levers                           -> the id of one that was, with these levers on; it answers by itself
    poll  pid                              -> the exit code of such a process
    kill  pid                              -> it was ended
    stop                                   -> the process leaves at once
"""
