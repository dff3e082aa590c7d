package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// A timerSleeper sleeps for as long as it is told to within 0.1 ms. [time.Sleep] takes up to 1 ms longer in a
// process that has nothing else to do: then Go waits in epoll, which counts milliseconds.
type timerSleeper struct {
	fd   int
	file *os.File
}

func newSleeper() (sleeper, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, os.NewSyscallError("timerfd_create", err)
	}
	return timerSleeper{fd, os.NewFile(uintptr(fd), "timerfd")}, nil
}

func (s timerSleeper) sleep(d time.Duration) error {
	if d <= 0 {
		return nil
	}
	if err := unix.TimerfdSettime(s.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(d.Nanoseconds())}, nil); err != nil {
		return os.NewSyscallError("timerfd_settime", err)
	}
	_, err := s.file.Read(make([]byte, 8)) // how often it has expired
	return err
}

func (s timerSleeper) Close() error { return s.file.Close() }
