"""What there is to see: one object for each thing, with its words.

The commands print columns of these objects, the dashboard renders them, and :class:`Views` returns
them to applications.
"""

from pgqueue.views.limits import LimitView
from pgqueue.views.queues import QueueView, QueueViews
from pgqueue.views.schedules import ScheduleView
from pgqueue.views.tasks import TaskView
from pgqueue.views.views import Views

__all__ = ["LimitView", "QueueView", "QueueViews", "ScheduleView", "TaskView", "Views"]
