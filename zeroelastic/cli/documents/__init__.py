"""The documents of ``--json`` as pydantic models, strict: a key that is unknown or missing is an error.

    common       what the documents of all verbs have in common
    checkpoints  inspect, show, verify, diff
    copies       plan, reshard, export, convert
    runs         ls, latest, prune
    jobs         prove, timeline, doctor
    schemas      the model of each verb, and the JSON Schemas in docs/schemas

No verb imports this package, whose models cost time to build, but for a report of ``--html``, which is made of the
verb's document; tests hold what the verbs print to them. Read ``schemas`` first.
"""
