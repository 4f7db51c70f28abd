"""Where each model goes: reads hardware, counts needs, and makes a plan or a refusal of both in a pure function."""
