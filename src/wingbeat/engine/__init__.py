"""The engine: scheduler and lanes on the host, one step on the device, two loops around it.

A request's way:
Engine.add -> Scheduler.schedule -> EngineCore.prepare -> Stepper.run -> EngineCore.digest -> ChoiceDelta.
"""
