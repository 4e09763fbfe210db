"""The commands of ``dptrain``, one file each: ``add(commands)`` declares one."""
