package server

import (
	"bytes"
	"fmt"
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

// Callers cannot fill the log: a line is written once in its interval, and so are lines with other names, up to a hundred.
func TestCallLog_HasEachNameOnceAMinute(t *testing.T) {
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
	noRule := func(keys string) service.Call {
		return service.Call{Operation: service.Gate, Result: service.NoRule, Domain: "edge", Keys: keys}
	}
	unknown := func(policy string) service.Call {
		return service.Call{Operation: service.Acquire, Err: &service.Error{Kind: service.UnknownPolicy, Detail: "No policy is named '" + policy + "'."}}
	}
	fault := func(sqlState string) service.Call {
		return service.Call{Operation: service.Peek, Err: &service.Error{Kind: service.Unavailable, SQLState: sqlState}}
	}
	for _, test := range []struct {
		call  func(name string) service.Call
		says  string
		level string
		every time.Duration
	}{
		{noRule, "domain=edge keys=", "WARN", time.Minute},
		{unknown, `detail="No policy is named '`, "WARN", time.Minute},
		{fault, "operation=peek reason=UNAVAILABLE sqlstate=", "ERROR", time.Second},
	} {
		now = now.Add(time.Hour)
		for _, name := range []string{"first", "second"} {
			line := said(test.call(name))
			require.Contains(t, line, "level="+test.level)
			require.Contains(t, line, test.says+name)
			require.Empty(t, said(test.call(name)))
		}
		now = now.Add(test.every - 1)
		require.Empty(t, said(test.call("first")))
		now = now.Add(1)
		require.Contains(t, said(test.call("first")), "first")
		now = now.Add(-time.Hour)
		require.Contains(t, said(test.call("first")), "first", "a clock that was set back")
		lines := 1
		for i := range 1000 {
			lines += strings.Count(said(test.call(fmt.Sprint(i))), "\n")
		}
		require.Equal(t, 100, lines)
		now = now.Add(test.every)
		require.NotContains(t, said(test.call("first")), "no more are logged")
	}
	require.Less(t, len(said(noRule(long))), 600)
	require.Less(t, len(said(unknown(long))), 600)
	for _, call := range []service.Call{{Operation: service.Acquire}, {Err: &service.Error{Kind: service.InvalidArgument}}, {Err: &service.Error{Kind: service.Canceled}}} {
		require.Empty(t, said(call))
	}
}
