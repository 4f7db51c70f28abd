"""More than one API process: fronts speak HTTP, the lead process keeps engines, limits, books and everything exact.

Of a front and its lead: messages.py says what they tell each other, wire.py how. In the front run __main__.py,
front.py, app.py, lead.py, remote_engine.py and forward.py; in the lead fronts.py, process.py, calls.py,
lead_requests.py and listeners.py.
"""
