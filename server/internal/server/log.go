package server

import (
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
