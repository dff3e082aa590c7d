package main

import (
	"fmt"
	"os"
	"runtime"
	"strings"
	"syscall"

	"github.com/prometheus/procfs"
)

// describe tells what was measured on: the machine and the versions.
func (l *lab) describe() map[string]string {
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	cores, _ := os.ReadFile("/proc/cpuinfo")
	_, processor, _ := strings.Cut(string(cores), "model name\t: ")
	processor, _, _ = strings.Cut(processor, "\n")
	machine := map[string]string{
		"machine": fmt.Sprintf("%d cores of %s, %.0f GB", runtime.NumCPU(), processor, float64(memory())/1024),
		"kernel":  "Linux " + strings.TrimSpace(string(kernel)),
		"Go":      runtime.Version(),
	}
	for _, server := range l.redis {
		machine["Redis"] = server.version + ", unix socket, go-redis' default of connections, no snapshots"
	}
	if l.pg != nil {
		machine["PostgreSQL"] = fmt.Sprintf("%s, unix socket, %d connections, %d where commits are flushed", l.pg.Version, connections, connectionsFlushed)
	}
	return machine
}

// cpuOf returns the microseconds of CPU time that processes and their children have used.
func cpuOf(pids ...int) (used float64) {
	for _, pid := range pids {
		for _, p := range family(pid) {
			ticks := p.UTime + p.STime
			if p.PID == pid { // has those of children that have ended, too
				ticks += uint(p.CUTime + p.CSTime)
			}
			used += float64(ticks) * 1e6 / 100 // USER_HZ is 100 on all Linux
		}
	}
	return used
}

// family returns a process and its children.
func family(pid int) (list []procfs.ProcStat) {
	all, _ := procfs.AllProcs()
	for _, p := range all {
		stat, err := p.Stat() // else it has ended
		if err == nil && (stat.PID == pid || stat.PPID == pid) {
			list = append(list, stat)
		}
	}
	return list
}

// cpuOwn returns the microseconds of CPU time that this process has used.
func cpuOwn() float64 {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return float64(usage.Utime.Nano()+usage.Stime.Nano()) / 1000
}

// memory returns the machine's memory in megabytes.
func memory() int {
	proc, err := procfs.NewDefaultFS()
	if err != nil {
		return 0
	}
	info, err := proc.Meminfo()
	if err != nil || info.MemTotalBytes == nil {
		return 0
	}
	return int(*info.MemTotalBytes >> 20)
}
