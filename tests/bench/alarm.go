//go:build !linux

package main

import "time"

// Elsewhere than on Linux, [time.Sleep] is exact.
type alarm struct{}

func newAlarm() alarm { return alarm{} }

func (alarm) sleepUntil(due time.Time) { time.Sleep(time.Until(due)) }

func (alarm) Close() error { return nil }
