package server

import (
	"bytes"
	"log"
	"log/slog"
	"strings"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

// A seldom allows an act at most once in each interval.
type seldom struct {
	every time.Duration
	last  atomic.Int64 // nanoseconds since 1970
}

func (s *seldom) may(now time.Time) bool {
	last := s.last.Load()
	since := now.UnixNano() - last
	return (since < 0 || since >= int64(s.every)) && s.last.CompareAndSwap(last, now.UnixNano())
}

// A callLog logs what callers learn little of: errors of the server and its database, requests that match no rule, and unknown
// policies. The metrics count all of them.
type callLog struct {
	log                        *slog.Logger
	now                        func() time.Time
	faults, unmatched, unknown seldom
}

func newCallLog(log *slog.Logger, now func() time.Time) *callLog {
	return &callLog{log: log, now: now, faults: seldom{every: time.Second}, unmatched: seldom{every: time.Minute}, unknown: seldom{every: time.Minute}}
}

func (l *callLog) observe(call service.Call) {
	switch err := call.Err; {
	case call.Unmatched != nil:
		if l.unmatched.may(l.now()) {
			domain, keys := call.Unmatched()
			l.log.Warn("no rule is about a request, which has passed; others like it are not logged for a minute", "domain", clip(domain), "keys", clip(keys))
		}
	case err == nil || err.Kind == service.Canceled:
	case err.Kind == service.UnknownPolicy:
		if l.unknown.may(l.now()) {
			l.log.Warn("a request is for a policy that is not there; others like it are not logged for a minute", "operation", string(call.Operation), "detail", clip(err.Detail))
		}
	case !err.Kind.IsRefusal() && l.faults.may(l.now()):
		l.log.Error("call failed", "operation", string(call.Operation), "reason", err.Kind.Reason(), "sqlstate", err.SQLState, "error", err.Unwrap())
	}
}

// clip shortens a text of a caller, which could fill the log.
func clip(text string) string {
	const most = 200
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// A connectionLog receives the log of package http. Connection errors are logged at Debug, panics at Error.
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
