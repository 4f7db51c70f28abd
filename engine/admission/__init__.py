"""The bounded, fair queue of one model: who is let in next, and who is refused."""

from engine.admission.admission import Admission, Room, Ticket

__all__ = ["Admission", "Room", "Ticket"]
