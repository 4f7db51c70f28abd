"""The bounded, fair queue of one model: who is let in next, and who is refused."""

from engine.admission.admission import Admission, ChatTicket, Room, Ticket

__all__ = ["Admission", "ChatTicket", "Room", "Ticket"]
