package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// An alarm is exact to 0.1 ms, and holds no thread. In a process that has nothing else to do, [time.Sleep] waits in epoll, which counts
// milliseconds. A system call that sleeps would keep one of two processors from the callers for up to 10 ms.
type alarm struct {
	fd int
	*os.File
}

func newAlarm() alarm {
	fd := must(unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC))
	return alarm{fd, os.NewFile(uintptr(fd), "alarm")} // File.Fd would have it block
}

func (a alarm) sleepUntil(due time.Time) {
	if left := time.Until(due); left > 0 {
		check(unix.TimerfdSettime(a.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(left.Nanoseconds())}, nil))
		must(a.Read(make([]byte, 8)))
	}
}
