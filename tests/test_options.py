from pgqueue.options import OPTIONS, JobOptions, TaskOptions


def test_type_checkers_know_the_declared_options_and_no_others() -> None:
    of_task = {each.name for each in OPTIONS if "task" in each.metadata["is_for"]}
    of_enqueue = {each.name for each in OPTIONS if "enqueue" in each.metadata["is_for"]}

    assert TaskOptions.__annotations__.keys() == of_task | {"name"}
    assert JobOptions.__annotations__.keys() == of_enqueue
