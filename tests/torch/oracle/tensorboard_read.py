"""tensorboard_read.py FOLDER - prints the scalars of the event files in a folder, as the tensorboard package reads them.
Each line has tag, step and value.  If the package is not installed, the script prints the reason and exits with 77."""
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
