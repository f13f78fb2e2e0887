"""tensorboard_read.py FOLDER - the scalars of the event files in a folder as the tensorboard package reads them, one line
each: tag, step, value.  Exits with 77 and the reason where the package is not installed."""
import sys

try:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
except ImportError as error:
    print(error)
    sys.exit(77)

events = EventAccumulator(sys.argv[1], size_guidance={"scalars": 0})
events.Reload()
for tag in sorted(events.Tags()["scalars"]):
    for event in events.Scalars(tag):
        print(tag, event.step, "%.9g" % event.value)
