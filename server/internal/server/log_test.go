package server

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/server/internal/service"
)

func TestConnectionLog(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	log := newConnectionLog(slog.New(slog.NewTextHandler(&text, nil)))
	log.Print("http: TLS handshake error from 192.0.2.1:4711: EOF")
	require.Empty(t, text.String())
	log.Print("http: panic serving 192.0.2.1:4711: a bug\ngoroutine 1 [running]:")
	require.Contains(t, text.String(), "level=ERROR")
}

// Callers cannot fill the log: each kind of line is written once in its interval.
func TestCallLog_TellsOfLimitsThatAreOffOnceAMinute(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	now := time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	log := newCallLog(slog.New(slog.NewTextHandler(&text, nil)), func() time.Time { return now })
	said := func(call service.Call) string {
		text.Reset()
		log.observe(call)
		return text.String()
	}
	long := strings.Repeat("ü", 1000)
	for call, want := range map[*service.Call]struct {
		says  string
		every time.Duration
	}{
		{Operation: service.Gate, Result: service.NoRule, Unmatched: func() (string, string) { return "edge", "user, " + long }}: {`domain=edge keys="user, ü`, time.Minute},
		{Operation: service.Acquire, Err: &service.Error{Kind: service.UnknownPolicy, Detail: "No policy is named 'nobody'. " + long}}: {
			`operation=acquire detail="No policy is named 'nobody'. ü`, time.Minute},
		{Operation: service.Peek, Err: &service.Error{Kind: service.Unavailable}}: {"reason=UNAVAILABLE", time.Second},
	} {
		line := said(*call)
		require.Contains(t, line, want.says)
		require.Less(t, len(line), 600)
		now = now.Add(want.every - 1)
		require.Empty(t, said(*call))
		now = now.Add(1)
		require.Contains(t, said(*call), want.says)
		now = now.Add(-time.Hour)
		require.Contains(t, said(*call), want.says, "a clock that was set back")
	}
	for _, call := range []service.Call{{Operation: service.Acquire}, {Err: &service.Error{Kind: service.InvalidArgument}}, {Err: &service.Error{Kind: service.Canceled}}} {
		require.Empty(t, said(call))
	}
}
