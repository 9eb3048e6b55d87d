"""The chat templates of MoEMB repositories. All end with `<emb>`, the token whose state is the embedding.

A video is written as its placeholder alone: the processor puts the timestamps and the vision tokens of each frame
there.
"""

_CONTENT = """\
{%- macro render(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content -%}
{%- if part is string -%}
{{- part -}}
{%- elif part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == 'video' -%}
<|video_pad|>
{%- elif part.type == 'text' -%}
{{- part.text -}}
{%- else -%}
{{- raise_exception('a message part must have the type text, image or video') -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""

# Qwen's turns, as the large checkpoints were trained on; the instruction is the system turn.
QWEN_TEMPLATE = (
    _CONTENT
    + """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{{- render(message.content) -}}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\\n<emb>' -}}
"""
)

# For a small model every token counts: the instruction, if any, is closed by <|im_end|>, and the content follows bare.
LEAN_TEMPLATE = (
    _CONTENT
    + """\
{%- for message in messages -%}
{{- render(message.content) -}}
{%- if not loop.last or message.role == 'system' -%}
{{- '<|im_end|>' -}}
{%- endif -%}
{%- endfor -%}
{{- '<emb>' -}}
"""
)

# The lean template for stock tokenizers, which read only the vocabulary of tokenizer.json and normalise to NFC: what
# moemb-mini's tokenizer does besides (lower case, a space before each stretch of text) is done here.
LEAN_STOCK_TEMPLATE = """\
{%- set state = namespace(fresh=true) -%}
{%- for message in messages -%}
{%- set parts = [message.content] if message.content is string else message.content -%}
{%- for part in parts -%}
{%- if part is string or part.type == 'text' -%}
{%- set text = (part if part is string else part.text) | lower -%}
{%- if text -%}
{{- (' ' if state.fresh else '') + text -}}
{%- set state.fresh = false -%}
{%- endif -%}
{%- elif part.type == 'image' -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- set state.fresh = true -%}
{%- elif part.type == 'video' -%}
<|video_pad|>
{%- set state.fresh = true -%}
{%- else -%}
{{- raise_exception('a message part must have the type text, image or video') -}}
{%- endif -%}
{%- endfor -%}
{%- if not loop.last or message.role == 'system' -%}
{{- '<|im_end|>' -}}
{%- set state.fresh = true -%}
{%- endif -%}
{%- endfor -%}
{{- '<emb>' -}}
"""
