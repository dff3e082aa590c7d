package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cpuOf returns the CPU time that a process and its children have used, from /proc.
func cpuOf(pid int) time.Duration {
	used := time.Duration(0)
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		stat, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		// The name, in parentheses, may contain anything; then come state, parent and so on.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		own := strings.HasPrefix(file, fmt.Sprintf("/proc/%d/", pid))
		if !own && fields[1] != strconv.Itoa(pid) {
			continue
		}
		count := []int{11, 12} // utime, stime
		if own {
			count = append(count, 13, 14) // and of children that have ended
		}
		for _, i := range count {
			ticks, _ := strconv.Atoi(fields[i])
			used += time.Duration(ticks) * time.Second / 100 // USER_HZ is 100 on all Linux
		}
	}
	return used
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

// steal returns how much CPU time the hypervisor has given to others, and how much there was in all.
func steal() (stolen, total float64) {
	stat, _ := os.ReadFile("/proc/stat")
	line, _, _ := strings.Cut(string(stat), "\n")
	for i, text := range strings.Fields(line) {
		ticks, err := strconv.ParseFloat(text, 64)
		if err != nil || i > 8 { // guests' time is counted twice
			continue
		}
		total += ticks
		if i == 8 {
			stolen = ticks
		}
	}
	return stolen, total
}
