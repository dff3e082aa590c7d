package main

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

// separate gives this process half of the cores and others, with their children, the rest, until back.
func separate(others ...int) (back func(), err error) {
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return nil, err
	}
	var ours, theirs unix.CPUSet
	for core, given := 0, 0; given < all.Count(); core++ {
		if !all.IsSet(core) {
			continue
		}
		if given < all.Count()/2 {
			theirs.Set(core)
		} else {
			ours.Set(core)
		}
		given++
	}
	if theirs.Count() == 0 {
		return nil, fmt.Errorf("callers and server cannot have cores of their own: there is %d", runtime.NumCPU())
	}
	move := func(ours, theirs *unix.CPUSet) {
		setCores(os.Getpid(), ours)
		for _, pid := range others {
			for _, one := range append(children(pid), pid) {
				setCores(one, theirs)
			}
		}
	}
	move(&ours, &theirs)
	return func() { move(&all, &all) }, nil
}

// setCores sets those of all threads of a process, as far as they are still there.
func setCores(pid int, cores *unix.CPUSet) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/[0-9]*", pid))
	for _, thread := range threads {
		if id, err := strconv.Atoi(filepath.Base(thread)); err == nil {
			_ = unix.SchedSetaffinity(id, cores)
		}
	}
}

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
