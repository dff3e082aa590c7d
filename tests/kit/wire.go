package kit

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
)

// A Wire is a session to which any bytes can be sent, also those that a driver would not, and any number of statements at a time.
type Wire struct {
	Conn     net.Conn
	frontend *pgproto3.Frontend
}

func (db *TestDB) Wire(t testing.TB) *Wire {
	hijacked := NoError(NoError(pgconn.Connect(context.Background(), db.URL))(t).Hijack())(t)
	t.Cleanup(func() { hijacked.Conn.Close() })
	return &Wire{hijacked.Conn, hijacked.Frontend}
}

// A Message is sent with others or alone, and is answered before the next one is read.
type Message []pgproto3.FrontendMessage

// A Response is what a message was answered with: an SQLSTATE, or rows of columns parted by bars.
type Response struct {
	Code, Message string
	Rows          []string
	Values        [][]string // of the rows
	Inside        bool       // a transaction is open after it
	Warning       string     // the last one
}

func (r Response) String() string {
	if r.Code != "" {
		return r.Code + " " + r.Message
	}
	return fmt.Sprintf("%q", r.Rows)
}

// Ask sends all messages while it reads the responses.
func (w *Wire) Ask(messages []Message) ([]Response, error) {
	var bytes []byte
	for _, message := range messages {
		for _, part := range message {
			var err error
			if bytes, err = part.Encode(bytes); err != nil {
				return nil, err
			}
		}
	}
	if err := w.Conn.SetDeadline(time.Now().Add(10 * Patience)); err != nil {
		return nil, err
	}
	sent := make(chan error, 1)
	go func() {
		_, err := w.Conn.Write(bytes)
		sent <- err
	}()
	responses := make([]Response, len(messages))
	for i := range responses {
		if err := w.read(&responses[i]); err != nil {
			return nil, fmt.Errorf("no answer to message %d of %d: %w", i+1, len(messages), err)
		}
	}
	return responses, <-sent
}

func (w *Wire) read(r *Response) error {
	for {
		received, err := w.frontend.Receive()
		if err != nil {
			return err
		}
		switch m := received.(type) {
		case *pgproto3.DataRow:
			var columns []string
			for _, value := range m.Values {
				columns = append(columns, string(value))
			}
			r.Rows, r.Values = append(r.Rows, strings.Join(columns, "|")), append(r.Values, columns)
		case *pgproto3.ErrorResponse:
			r.Code, r.Message = m.Code, m.Message
		case *pgproto3.NoticeResponse:
			r.Warning = m.Message
		case *pgproto3.ReadyForQuery:
			r.Inside = m.TxStatus != 'I'
			return nil
		}
	}
}
