package server

import (
	"bytes"
	"log/slog"
	"testing"

	"github.com/stretchr/testify/require"
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
