"""Where each model goes: hardware is read, needs are counted, and a pure function makes of both a plan or a refusal."""
