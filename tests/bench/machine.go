package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// describe tells what was measured on: the machine and the versions.
func (l *lab) describe() map[string]string {
	kernel, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	machine := map[string]string{
		"machine": fmt.Sprintf("%d cores of %s, %.0f GB", runtime.NumCPU(), lineOf("/proc/cpuinfo", "model name"), float64(memory())/1024),
		"kernel":  "Linux " + strings.TrimSpace(string(kernel)),
		"system":  strings.Trim(lineOf("/etc/os-release", "PRETTY_NAME"), `"`),
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

// lineOf returns the value of the first line of a file that begins with a name.
func lineOf(file, name string) string {
	text, _ := os.ReadFile(file)
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(strings.TrimLeft(rest, " \t:="))
		}
	}
	return "unknown"
}

// cpuOf returns the CPU time that processes and their children have used, from /proc.
func cpuOf(pids ...int) (used time.Duration) {
	for _, pid := range pids {
		used += cpuOfStat(pid, 11, 12, 13, 14) // utime, stime, and those of children that have ended
		for _, child := range children(pid) {
			used += cpuOfStat(child, 11, 12)
		}
	}
	return used
}

func cpuOfStat(pid int, indexes ...int) (used time.Duration) {
	fields := statOf(pid)
	for _, i := range indexes {
		if i < len(fields) { // else it has ended
			ticks, _ := strconv.Atoi(fields[i])
			used += time.Duration(ticks) * time.Second / 100 // USER_HZ is 100 on all Linux
		}
	}
	return used
}

// children lists those of a process.
func children(pid int) (list []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		child, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if fields := statOf(child); len(fields) > 1 && fields[1] == strconv.Itoa(pid) {
			list = append(list, child)
		}
	}
	return list
}

// statOf returns what /proc says about a process, from its state and its parent on.
func statOf(pid int) []string {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil // it has ended
	}
	return strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:])) // after its name, which may contain anything
}

// cpuOwn returns the CPU time that this process has used.
func cpuOwn() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// memory returns the machine's memory in megabytes.
func memory() int {
	info, _ := os.ReadFile("/proc/meminfo")
	_, rest, _ := strings.Cut(string(info), "MemTotal:")
	kilobytes, _, _ := strings.Cut(strings.TrimSpace(rest), " ")
	n, _ := strconv.Atoi(kilobytes)
	return n / 1024
}
