package server

import (
	"bytes"
	"log"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// A faultLog has the errors for which no request is to blame, at most one a second: callers learn little of them, and the
// metrics count them.
type faultLog struct {
	log  *slog.Logger
	last atomic.Int64 // second of the last one
}

func (f *faultLog) observe(call service.Call) {
	if call.Err == nil || call.Err.Kind.IsRefusal() || call.Err.Kind == service.Canceled {
		return
	}
	now := time.Now().Unix()
	if last := f.last.Load(); now == last || !f.last.CompareAndSwap(last, now) {
		return
	}
	f.log.Error("call failed", "operation", string(call.Operation), "reason", call.Err.Kind.Reason(), "sqlstate", call.Err.SQLState, "error", call.Err.Unwrap())
}

// A connectionLog is what package http writes. What strangers do to their own connections is for those who look for it. A
// panic is ours.
type connectionLog struct{ log *slog.Logger }

func newConnectionLog(to *slog.Logger) *log.Logger { return log.New(connectionLog{to}, "", 0) }

func (c connectionLog) Write(p []byte) (int, error) {
	tell := c.log.Debug
	if bytes.HasPrefix(p, []byte("http: panic serving ")) {
		tell = c.log.Error
	}
	tell(string(bytes.TrimSpace(p)))
	return len(p), nil
}
